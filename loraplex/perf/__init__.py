"""Costs on one machine in seconds: predicted from measurements, corrected while serving."""
