"""What ktqueue knows of each model family: one entry of `family.Family` for each. Knows no torch and no files."""
