"""The role *server*: it leases micro-batches, and moves its part of the parameters by each push.

Ways in: `first_server.Serving`, `other_server.Following`, and for a worker of such a run
`async_worker.Working`.
"""
