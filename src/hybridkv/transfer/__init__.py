"""Traffic between engine and store: threads and, later, jobs, queues and the save ledger."""
