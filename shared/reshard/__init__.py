"""The layout algebra, plan, control board and transports that trainer and engine share."""
