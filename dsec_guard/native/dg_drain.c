// SPDX-License-Identifier: Apache-2.0
/*
 * dg_drain.c - take whole records off a BPF ring buffer into the caller's memory.
 *
 * One call copies thousands of records, so that Python crosses into C once per batch and no callback is made. Needs
 * nothing of libbpf: the layout is part of the kernel's interface (Documentation/bpf/ringbuf.rst): page 0 of the map is
 * the consumer's position (writable), then the producer's position, then the data, mapped twice in a row so that a
 * record never wraps.
 */
#include <errno.h>
#include <linux/bpf.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct dg_ring {
	uint64_t *consumer;
	const uint64_t *producer;
	const uint8_t *data;
	size_t page;
	size_t size;
};

/* In front of each copied record; records start at multiples of 8. */
struct dg_frame {
	uint32_t length;
	uint32_t reserved;
};

#define DG_PUBLIC __attribute__((visibility("default")))

DG_PUBLIC int dg_ring_open(int map_fd, size_t size, struct dg_ring **out);
DG_PUBLIC long dg_ring_drain(struct dg_ring *ring, uint8_t *out, size_t room, uint32_t max_records, uint32_t *records);
DG_PUBLIC void dg_ring_close(struct dg_ring *ring);

/* dg_ring_open - map the ring of @map_fd, whose max_entries is @size bytes. Returns 0 or -errno. */
int dg_ring_open(int map_fd, size_t size, struct dg_ring **out)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct dg_ring *ring = calloc(1, sizeof(*ring));
	void *base;
	int error;

	if (!ring)
		return -ENOMEM;
	ring->page = page;
	ring->size = size;
	base = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, map_fd, 0);
	if (base == MAP_FAILED) {
		error = -errno;
		free(ring);
		return error;
	}
	ring->consumer = base;
	base = mmap(NULL, page + 2 * size, PROT_READ, MAP_SHARED, map_fd, (off_t)page);
	if (base == MAP_FAILED) {
		error = -errno;
		munmap(ring->consumer, page);
		free(ring);
		return error;
	}
	ring->producer = base;
	ring->data = (const uint8_t *)base + page;
	*out = ring;
	return 0;
}

/*
 * dg_ring_drain - copy up to @max_records finished records into @out, each behind a struct dg_frame, and free their
 * place in the ring. One reader at a time.
 * Returns the bytes written (0: nothing finished), or -ENOSPC when not even the first one fits into @room.
 */
long dg_ring_drain(struct dg_ring *ring, uint8_t *out, size_t room, uint32_t max_records, uint32_t *records)
{
	uint64_t at = __atomic_load_n(ring->consumer, __ATOMIC_RELAXED);
	uint64_t end = __atomic_load_n(ring->producer, __ATOMIC_ACQUIRE);
	size_t used = 0;
	uint32_t taken = 0;
	long result = 0;

	while (at < end && taken < max_records) {
		const uint8_t *head = ring->data + (at & (ring->size - 1));
		uint32_t word = __atomic_load_n((const uint32_t *)head, __ATOMIC_ACQUIRE);
		uint32_t length = word & ~(BPF_RINGBUF_BUSY_BIT | BPF_RINGBUF_DISCARD_BIT);
		size_t padded = ((size_t)length + 7) & ~(size_t)7;
		struct dg_frame frame = { .length = length };

		/* Still being written: what comes after it waits too, so that the order is kept. */
		if (word & BPF_RINGBUF_BUSY_BIT)
			break;
		if (!(word & BPF_RINGBUF_DISCARD_BIT)) {
			if (used + sizeof(frame) + padded > room) {
				if (!taken)
					result = -ENOSPC;
				break;
			}
			memcpy(out + used, &frame, sizeof(frame));
			memcpy(out + used + sizeof(frame), head + BPF_RINGBUF_HDR_SZ, length);
			memset(out + used + sizeof(frame) + length, 0, padded - length);
			used += sizeof(frame) + padded;
			taken++;
		}
		at += BPF_RINGBUF_HDR_SZ + padded;
		__atomic_store_n(ring->consumer, at, __ATOMIC_RELEASE);
	}
	*records = taken;
	return result ? result : (long)used;
}

void dg_ring_close(struct dg_ring *ring)
{
	if (!ring)
		return;
	munmap((void *)(uintptr_t)ring->producer, ring->page + 2 * ring->size);
	munmap(ring->consumer, ring->page);
	free(ring);
}
