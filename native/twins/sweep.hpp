// The driver all operations share: runs over the 32 x 32 tiles of rows x columns that hold pairs outside the
// local window, on all threads, and hands each tile of approximate similarities to the operation while it is
// in cache.
#pragma once

#include "core/parallel.hpp"
#include "twins/pack.hpp"

#include <atomic>
#include <vector>

namespace twinkv {

// Columns that a row must not be compared with, as a range [begin, end) of column indices.
struct Band {
    int32_t begin, end;
};

// Those within the local window of each row, itself among them.
std::vector<Band> window_bands(const Head& head, const Packed& rows, const Packed& columns);

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

    Problem(const Head& head, const Kernels& kernels, const Center& center, const Packed& rows,
            const Packed& columns, std::vector<Band> bands, bool triangle);
};

// A range of row groups and of panels: what a thread takes at once. Panels are visited outwards from where
// the rows themselves stand: tokens are most similar to those near them, and the sooner a good twin is known,
// the fewer others need a look.
struct Task {
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

std::vector<Task> make_tasks(const Problem& problem);

// Fills allowed; false when no pair of the tile may be compared.
bool clip_to_bands(const Problem& problem, Tile& tile);

// Fills allowed and partial; false when no pair of the tile may be compared.
inline bool clip(const Problem& problem, Tile& tile) {
    const Band& hull = problem.hulls[size_t(tile.group)];
    tile.partial = hull.begin < (tile.panel + 1) * tile_size && hull.end > tile.panel * tile_size;
    return !tile.partial || clip_to_bands(problem, tile);
}

// More threads than this would cost more to start than they bring.
int useful_threads(const Problem& problem, int n_threads);

// make() gives every thread an Operation of its own:
//   begin(task), end(task)        around the tiles of a task
//   open(group) -> bool           false: no tile of this row group is needed any more
//   process(tile)
//   finish()                      once, at the end
template <class Make> void sweep(const Problem& problem, int n_threads, Make&& make) {
    const std::vector<Task> tasks = make_tasks(problem);
    std::atomic<size_t> next{0};
    const int workers = useful_threads(problem, n_threads);
    parallel_for(workers, workers, [&](int64_t) {
        auto operation = make();
        alignas(64) uint8_t state[64];
        if (problem.kernels.enter) {
            problem.kernels.enter(state);
        }
        // While one tile is looked at, the products of the next are already on their way: AMX works beside
        // the vector units if it is given its work early.
        Tile tiles[2];
        for (size_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
            const Task& task = tasks[t];
            operation.begin(task);
            int current = 0;
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
                    tile.error = problem.bound(problem.rows.group_lengths[size_t(group)],
                                               problem.columns.group_lengths[size_t(panel)]);
                    problem.kernels.tile(problem.rows.operand, group, problem.columns.operand, panel,
                                         tile.sim);
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
        if (problem.kernels.leave) {
            problem.kernels.leave(state);
        }
        operation.finish();
    });
}

} // namespace twinkv
