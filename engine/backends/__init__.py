"""How a device computes: one small interface, one module a device."""
