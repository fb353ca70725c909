"""One generation or score: its options, its rounds on the device, its result."""
