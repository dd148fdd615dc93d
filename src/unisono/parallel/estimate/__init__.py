"""Memory and traffic of strategies, by formula, without ranks: `unisono plan`."""
