"""The rollout API: environments post scored groups, the trainer leases batches of them.

wire        the contract, all that clients need
groups      a posted body becomes groups: read, checked, packed
queue       the pure state machine; batch: which groups make a batch
store       the queue's records in SQLite, and the groups' bytes in memory and on disk
overview    what the queue says of itself, and the status page's history
service     queue, store and history in step; the endpoints that need no more
app         the endpoints that read long bodies, wait or show pages; refusals, metrics, the gate
http        routes, bodies, answers and waiting; server: the process, its socket and its end
"""
