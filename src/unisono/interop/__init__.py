"""Foreign libraries, one per module; none is imported before it is asked for."""
