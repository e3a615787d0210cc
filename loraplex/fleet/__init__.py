"""The deciding code of many replicas: loads, routing, placement, migration."""
