"""What all rooms use and none of them owns. This room imports no other.

faults        exit codes, `Fault`, `as_fault`, `one_line`
files         `fsync`, `write_atomically`, `sha256`, the manifest of a folder, `latest` and other
              names of checkpoints
describing    `describe`, `Describing`: a manifest's entries, made while others are written
ranks         `gather`, `from_first`, `first_fault`, `from_rank_zero`
program       `plain_output`, `outlast_readers`, `wait_until`: how programs print and wait
machine       `cores`, `free_memory_bytes`, `die_with`: what the machine has
work_folder   `locked`, `publish`: the folder beside an --output, in which it is made
ending        `in_one_sentence`, `on_disk`: how a program that works on folders ends
names         `nearest`, `unknown`, `hub_name`, `reach_hub`, `shown`: what a mistyped flag, model or
              folder may mean; `command`: a command as a shell takes it; `at_home`: a path with `~`
fabric        `Fabric` and its strategies: the one import of Lightning
failpoints    `failpoint`: named places where tests make a run fail
help          `answer_help`: what --help prints, from the declarations of flags
flag          `Flag`, `option`, `Flags`: flags as fields of dataclasses, and the values they take
plain_yaml    `read_yaml`, `write_yaml`: YAML that may come from anybody
command_line  `parse`, `fail`: words and the file of --config -> values of flags, one sentence for
              each mistake
register      `schedule`, `loss`, `optimizer`, `source`, `metric`, `flags`: your code beside ours;
              `load`
"""
