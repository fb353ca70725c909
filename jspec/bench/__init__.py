"""`jspec bench`: the engine at real model shapes, with random weights and imposed acceptance."""
