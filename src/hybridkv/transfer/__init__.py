"""Traffic between engine and store: jobs, threads, staging, deadlines, the save ledger, block memory."""
