"""What reshard costs, measured on the machine at hand. Each module is a command."""
