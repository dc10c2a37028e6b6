"""Advantages, losses and their denominators: pure functions on tensors."""
