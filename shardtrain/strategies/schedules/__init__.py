"""Pipeline schedules as data: tables of what runs when, proofs about them, figures, pictures."""
