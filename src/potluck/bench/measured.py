"""What the processes of FedAvg hand each other on disk."""

ADAPTER = "adapter"
SUMMARY_FILE = "summary.json"
