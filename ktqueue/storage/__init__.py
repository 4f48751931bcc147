"""Where the bodies of files and batches are kept: a folder, or object storage. Knows neither HTTP nor Redis."""
