"""arq's workers: the bridge for arq clients, and the control worker for webhooks and batch files."""
