"""From received bytes to live weights: where they may land, by proof, and how they take effect."""
