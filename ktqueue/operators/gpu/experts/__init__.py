"""The routed experts of a model: where they are, which of them move, and one step over all of them."""
