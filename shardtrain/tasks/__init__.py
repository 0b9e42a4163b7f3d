"""What a workload is: its batch, its loss terms, its metrics."""
