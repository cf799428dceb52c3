"""Updates of a follower: what one committed step changes in the step before."""
