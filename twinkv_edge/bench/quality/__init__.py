"""Does it keep what matters? Tasks answered under many compressions of one prefill, and the tables made of it."""
