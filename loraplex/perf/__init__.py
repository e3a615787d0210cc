"""What things cost on one machine, as plain numbers: predicted from measurements, corrected while serving."""
