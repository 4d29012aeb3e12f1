/* Ranks of a communicator that are real processes on this machine (ranks.c). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXCHANGE_BYTES (1024 * 1024) /* largest payload that travels between processes */

struct meeting;

/* Joins the meeting of `ranks` processes under `key` and waits for all; NULL after a time-out or a death,
 * which is then said on stderr. */
struct meeting *meeting_join(uint64_t key, int rank, int ranks);
void meeting_leave(struct meeting *meeting);

/* Every rank gives `bytes` (at most EXCHANGE_BYTES); afterwards meeting_given reads what each gave, until
 * the next exchange but one.  False after a time-out or a death. */
bool meeting_exchange(struct meeting *meeting, const void *data, size_t bytes, const char *purpose);
const void *meeting_given(const struct meeting *meeting, int rank);

/* Messages between two ranks: sending never waits, receiving does. */
bool meeting_send(struct meeting *meeting, int to, const void *data, size_t bytes);
bool meeting_receive(struct meeting *meeting, int from, void *data, size_t bytes);
