"""Where each token lives on each rank: pure functions of plain integers."""
