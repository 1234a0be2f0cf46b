# Programs with bodies to write (README.md). Included by ../Makefile.
#   make lab PROGRAM=ddp         makes labs/ddp, with a list of what to write
#   make check-lab PROGRAM=ddp   builds it and says which claims hold; LAB=FOLDER: one that is elsewhere
COMMANDS += lab check-lab
INTERNAL += lab-program
LABS := $(patsubst labs/%.toml,%,$(wildcard labs/*.toml))
LAB_GOAL := $(firstword $(filter lab lab-program check-lab,$(MAKECMDGOALS)))
ifneq ($(LAB_GOAL),)
ifeq ($(filter $(LABS),$(PROGRAM)),)
$(error PROGRAM must be one of: $(LABS); not '$(PROGRAM)'. For example: make $(LAB_GOAL) PROGRAM=ddp)
endif
LAB ?= labs/$(PROGRAM)
LAB_PROGRAM := $(LAB)/build/train_gpt2_$(PROGRAM)
WITH_MPI += $(if $(filter-out single,$(PROGRAM)),$(LAB_PROGRAM))
C_BUILDS += $(LAB_PROGRAM)
# A student waits for each build: a program of several ranks takes 12 s of one core with -O3, and 5 s with -O1. A blank
# compiles, but not everything is called yet.
$(LAB_PROGRAM): OPTIMISE := -O1 -g
$(LAB_PROGRAM): WARNINGS := -Wall -Wextra -Wno-unused -Werror=return-type
$(LAB_PROGRAM): CFLAGS_ALL += -I.
lab:
	@python3 labs/make_lab.py $(PROGRAM) $(LAB)
lab-program: $(LAB_PROGRAM) data/train.bin
check-lab:
	@python3 -m labs.check_lab $(PROGRAM) $(LAB)
$(LAB_PROGRAM): $(LAB)/train_gpt2_$(PROGRAM).cu
$(LAB)/train_gpt2_$(PROGRAM).cu:
	@echo "error: there is no $@:" \
	    "make lab PROGRAM=$(PROGRAM)$(if $(filter-out labs/$(PROGRAM),$(LAB)), LAB=$(LAB)) makes it" >&2; exit 1
endif
