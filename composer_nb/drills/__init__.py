"""What chapters, spikes and tests practise on: servers, races, planted faults. Kept by hand."""
