"""The trainer's side: weight sources, the hook, the publisher, clients of engines."""
