"""Pure decisions about many replicas: loads, routing, placement, migration."""
