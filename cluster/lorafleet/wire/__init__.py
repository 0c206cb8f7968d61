"""What crosses process borders: errors as google.rpc.Status, channels with sane limits."""
