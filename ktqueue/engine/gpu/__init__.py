"""How the engine runs steps on a GPU: captured decode graphs, staging buffers and token selection on the device."""
