"""What all rooms use and none of them owns. This room imports no other.

faults      exit codes, `Fault`, `as_fault`, `one_line`
files       `fsync`, `write_atomically`, `sha256`, and the manifest of a folder
ranks       `gather`, `from_first`, `first_fault`, `from_rank_zero`
step_names  `step_directories`, `checkpoints`, `latest`: the names of checkpoints
console     `outlast_readers`, `plain_output`, `Console`: output that never ends a run
ending      `in_one_sentence`, `uninterrupted`, `on_disk`: how the scripts end
spelling    `flag_instead`, `value_instead`, `nearest`: what a mistyped word may mean
names       `hub_name`, `nearest_of`, `shown`: the same for names of models and folders
fabric      `Fabric` and its strategies: the one import of Lightning
hub         `answer`: what to do about an error of the Hugging Face hub
machine     `cores`, `free_memory_bytes`: what this process may use
failpoints  `failpoint`: named places where tests make a run fail
command_line  `parse`, `Flags`: flags from dataclasses, one sentence for each mistake
plain_yaml  `read`, `load`: YAML of others, without aliases, merges and depth
"""
