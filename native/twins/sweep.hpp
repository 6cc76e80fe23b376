// The driver all operations share: runs over the 32 x 32 tiles of rows x columns that hold pairs outside the
// local window, on all threads, and hands each tile of approximate similarities to the operation while it is
// in cache.
#pragma once

#include "core/parallel.hpp"
#include "twins/pack.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <vector>

namespace twinkv {

// Columns that a row must not be compared with, as a range [begin, end) of column indices.
struct Band {
    int32_t begin, end;
};

// Those within the local window of each row, itself among them.
std::vector<Band> window_bands(const Head& head, const std::vector<int32_t>& rows, const std::vector<int32_t>& columns);

// The same for a set against itself, each pair once: nothing before the end of the window.
std::vector<Band> triangle_bands(const Head& head, const Packed& set);

struct Problem {
    const Head& head;
    const Kernels& kernels;
    const Center& center;
    const Packed& rows;
    const Packed& columns;
    std::vector<Band> bands; // one per row
    bool triangle;           // bands begin at 0 and end later from row to row
    ErrorBound bound;
    std::vector<Band> hulls; // per row group: a range with the bands of all its rows

    Problem(const Head& head, const Kernels& kernels, const Center& center, const Packed& rows, const Packed& columns,
            std::vector<Band> bands, bool triangle);
};

// A range of row groups and of panels: what a thread takes at once. Panels are visited outwards from where
// the rows themselves stand: tokens are most similar to those near them, and the sooner a good twin is known,
// the fewer others need a look.
struct Task {
    const Problem* problem;
    int64_t group_begin, group_end, panel_begin, panel_end, panel_near;

    int64_t panel(int64_t step) const { // step in [0, panel_end - panel_begin)
        const int64_t up = panel_near + step;
        return up < panel_end ? up : panel_near - 1 - (up - panel_end);
    }
};

struct Tile {
    alignas(64) float sim[tile_size * tile_size];
    uint32_t allowed[tile_size]; // pairs outside the local window
    bool partial;                // some are not allowed
    int64_t group, panel;
    float error; // for every pair of the tile: bound on |sim + shifts + c.c - true similarity|
};

// The bits set in masks [32], as places in a tile: 32 * row + column. -1 when they are more than limit.
inline int64_t list_bits(const uint32_t* masks, uint16_t* place, int64_t limit) {
    int64_t count = 0;
    for (int64_t r = 0; r < tile_size; r += 2) {
        for (uint64_t bits = masks[r] | uint64_t(masks[r + 1]) << 32; bits != 0; bits &= bits - 1) {
            if (count == limit) {
                return -1;
            }
            place[count++] = uint16_t(r * tile_size + __builtin_ctzll(bits));
        }
    }
    return count;
}

std::vector<Task> make_tasks(const std::vector<const Problem*>& problems);

// Fills allowed; false when no pair of the tile may be compared.
bool clip_to_bands(const Problem& problem, Tile& tile);

// Fills allowed and partial; false when no pair of the tile may be compared.
inline bool clip(const Problem& problem, Tile& tile) {
    const Band& hull = problem.hulls[size_t(tile.group)];
    tile.partial = hull.begin < (tile.panel + 1) * tile_size && hull.end > tile.panel * tile_size;
    return !tile.partial || clip_to_bands(problem, tile);
}

// More threads than this would cost more to start than they bring.
int useful_threads(const std::vector<const Problem*>& problems, int n_threads);

// While one tile is looked at, the products of the next are already on their way: AMX works beside the vector
// units if it is given its work early.
using TilePair = std::array<Tile, 2>;

template <class Operation> void run_task(const Task& task, Operation& operation, TilePair& tiles) {
    const Problem& problem = *task.problem;
    operation.begin(task);
    size_t current = 0;
    bool pending = false;
    for (int64_t step = 0; step < task.panel_end - task.panel_begin; ++step) {
        const int64_t panel = task.panel(step);
        for (int64_t group = task.group_begin; group < task.group_end; ++group) {
            Tile& tile = tiles[current];
            tile.group = group;
            tile.panel = panel;
            if (!operation.open(group) || !clip(problem, tile)) {
                continue;
            }
            tile.error =
                problem.bound(problem.rows.group_lengths[size_t(group)], problem.columns.group_lengths[size_t(panel)]);
            problem.kernels.tile(problem.rows.operand, group, problem.columns.operand, panel, tile.sim);
            if (pending) {
                operation.process(tiles[1 - current]);
            }
            pending = true;
            current = 1 - current;
        }
    }
    if (pending) {
        operation.process(tiles[1 - current]);
    }
    operation.end(task);
}

// make(problem) gives every thread an Operation of its own for each problem:
//   begin(task), end(task)        around the tiles of a task
//   open(group) -> bool           false: no tile of this row group is needed any more
//   process(tile)
//   finish()                      once, at the end
// All problems are of one head and one set of kernels.
template <class Make> void sweep(const std::vector<const Problem*>& problems, int n_threads, Make&& make) {
    const std::vector<Task> tasks = make_tasks(problems);
    const Kernels& kernels = problems[0]->kernels;
    std::atomic<size_t> next{0};
    const int workers = useful_threads(problems, n_threads);
    parallel_for(workers, workers, [&](int64_t) {
        using Operation = decltype(make(*problems[0]));
        std::vector<Operation> operations;
        for (const Problem* problem : problems) {
            operations.push_back(make(*problem));
        }
        alignas(64) uint8_t state[64];
        if (kernels.enter) {
            kernels.enter(state);
        }
        auto tiles = std::make_unique<TilePair>();
        for (size_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
            const auto index = std::find(problems.begin(), problems.end(), tasks[t].problem) - problems.begin();
            run_task(tasks[t], operations[size_t(index)], *tiles);
        }
        if (kernels.leave) {
            kernels.leave(state);
        }
        for (Operation& operation : operations) {
            operation.finish();
        }
    });
}

} // namespace twinkv
