"""How fast an engine gets a trainer's weights, by every method in turn, in one run."""
