# mpi_env.sh - lets mpirun start more ranks than this machine has cores, and lets root run it. Type once in a shell:
#
#   . dev/mpi_env.sh
#
# Open MPI refuses both unless it is told otherwise, and binds each rank to one core, which all OpenMP threads of the rank would share.
# Its versions 4 and 5 read different variables; other MPIs read none of these.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
