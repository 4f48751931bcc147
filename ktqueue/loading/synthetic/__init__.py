"""Models of random weights in the shapes of real ones, for measurements."""
