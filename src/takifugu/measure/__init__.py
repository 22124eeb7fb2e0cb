"""From observations to numbers: curves from losses, speeds and energies from timings."""
