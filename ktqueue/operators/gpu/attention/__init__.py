"""How a GPU step attends to the paged cache: one module per backend behind the protocols of `base`."""
