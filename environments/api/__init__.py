"""The rollout API: environments post scored groups, the trainer leases batches of them.

wire        the contract, all that clients need (with packing)
queue       the pure state machine; line, leases, selection, records, explain are its parts
store       SQLite journal; payloads: the groups' bytes in memory and on disk
service     queue, payloads and store in step
app         what each endpoint does; http, intake, groups, answers, polling are its parts
server      the process: socket, signals, end
"""
