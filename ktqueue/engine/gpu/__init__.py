"""How the engine runs steps on a GPU: captured steps, staging buffers and token selection on the device."""
