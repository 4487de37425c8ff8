"""statistics: means and covariances of what layers read."""
