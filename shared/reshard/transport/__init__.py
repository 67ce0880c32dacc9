"""Moving the bytes of a plan between ranks."""
