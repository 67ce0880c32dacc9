"""Plans: who sends which region to whom, with a certificate. Pure."""
