"""The programs of an engine on the device, and who calls them, in one process or several."""
