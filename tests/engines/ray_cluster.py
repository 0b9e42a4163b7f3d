"""A Ray cluster on this machine: a head without room, and nodes that can be killed.

`python ray_cluster.py NODES` prints the address, and then kills the last node for every line that
it reads.
"""

import sys


def main() -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(int(sys.argv[1]))]
    cluster.wait_for_nodes()
    print("address", cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
