"""The planner: pure functions that decide what to save, ask and load."""
