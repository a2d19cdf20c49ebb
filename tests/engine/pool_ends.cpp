// Pools of one to four threads that end right after a phase: all work is done once, and none waits for ever.
#include "../../engine/native/pool.h"

int main() {
    for (int round = 0; round < 400; round++) {
        farthing::Pool pool(1 + round % 4);
        for (int64_t count = 0; count < 60; count += 1 + round % 7) {
            std::vector<int> times(count, 0);
            pool.open();
            pool.each(count, [&](int64_t i) { times[i]++; });
            pool.run(count, [&](int64_t i) { times[i]++; });
            pool.close();
            for (int done : times)
                if (done != 2) return 1;
        }
    }
}
