"""Start the ranks of a run, hear whether they live, and hear who asks them to stop.

launch   `adopt_launcher`, `start_ranks`, `Children`: ranks of torchrun, srun, or started here
store    `Store`: heartbeats, and the first fault of the run, that the ranks tell each other
watch    `Watch`: which rank is missing, lost, frozen or hangs, and who failed first
stop     `StopSignal`, `Requests`: signals, files and --max_hours that ask for a stop or a save
"""
