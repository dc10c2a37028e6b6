"""Which tokens and layers each rank holds: pure functions of plain integers."""
