// llama.cpp driver: perplexity (as llama-perplexity), greedy continuations, tokens, pp/tg speed (as llama-bench).
//
// llama_driver [--fa] [--cache-f32] ppl|greedy|bench|tokens MODEL THREADS ...
//   ppl TEXT [CHUNKS]; greedy PROMPTS N; bench PROMPT N REPETITIONS; tokens TEXT
#include "llama.h"
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>
using namespace std;
static vector<llama_token> tok(const llama_vocab *v, const string &s, bool special) {
    vector<llama_token> t(s.size() + 8);
    int n = llama_tokenize(v, s.data(), s.size(), t.data(), t.size(), special, false);
    t.resize(n); return t;
}
static double now() { return chrono::duration<double>(chrono::steady_clock::now().time_since_epoch()).count(); }
int main(int c, char **a) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    bool fa = false, wide = false;
    while (c > 1 && !strncmp(a[1], "--", 2)) {
        fa |= !strcmp(a[1], "--fa"); wide |= !strcmp(a[1], "--cache-f32");
        c--; a++;
    }
    if (c < 5) { fputs("usage: see the first lines of llama_driver.cpp\n", stderr); return 2; }
    string mode = a[1];
    auto mp = llama_model_default_params();
    auto *m = llama_model_load_from_file(a[2], mp);
    auto *v = llama_model_get_vocab(m);
    int threads = atoi(a[3]);
    auto cp = llama_context_default_params();
    cp.n_ctx = 512; cp.n_batch = 512; cp.n_ubatch = 512; cp.n_threads = cp.n_threads_batch = threads;
    cp.flash_attn_type = fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (wide) cp.type_k = cp.type_v = GGML_TYPE_F32;
    auto *x = llama_init_from_model(m, cp);
    int nv = llama_vocab_n_tokens(v);
    auto batch = llama_batch_init(512, 0, 1);
    auto run = [&](const llama_token *t, int n, int pos, bool all) {
        batch.n_tokens = n;
        for (int i = 0; i < n; i++) {
            batch.token[i] = t[i]; batch.pos[i] = pos + i; batch.n_seq_id[i] = 1; batch.seq_id[i][0] = 0;
            batch.logits[i] = all || i == n - 1;
        }
        if (llama_decode(x, batch)) { puts("decode failed"); exit(1); }
    };
    auto clear = [&] { llama_memory_clear(llama_get_memory(x), true); };
    if (mode == "ppl") {
        ifstream f(a[4]); stringstream s; s << f.rdbuf();
        auto t = tok(v, s.str(), true);
        double nll = 0; int count = 0; int chunks = t.size() / 512;
        if (c > 5) chunks = min(chunks, atoi(a[5]));
        for (int k = 0; k < chunks; k++) {
            clear(); run(&t[k * 512], 512, 0, true);
            for (int j = 256; j < 511; j++) {
                const float *l = llama_get_logits_ith(x, j);
                double mx = -1e30; for (int i = 0; i < nv; i++) mx = max(mx, (double) l[i]);
                double z = 0; for (int i = 0; i < nv; i++) z += exp(l[i] - mx);
                nll -= l[t[k * 512 + j + 1]] - mx - log(z); count++;
            }
            fprintf(stderr, "[%d]%.4f ", k + 1, exp(nll / count));
        }
        printf("perplexity %.4f over %d tokens of %zu\n", exp(nll / count), count, t.size());
    } else if (mode == "tokens") {
        ifstream f(a[4]); stringstream s; s << f.rdbuf();
        for (auto t : tok(v, s.str(), false)) printf("%d ", t);
        puts("");
    } else if (mode == "greedy") {
        ifstream f(a[4]); string line; int n = atoi(a[5]);
        while (getline(f, line)) {
            auto t = tok(v, line, true); clear(); run(t.data(), t.size(), 0, false);
            vector<llama_token> out;
            for (int k = 0; k < n; k++) {
                const float *l = llama_get_logits_ith(x, -1);
                int best = 0; for (int i = 1; i < nv; i++) if (l[i] > l[best]) best = i;
                out.push_back(best);
                run(&best, 1, t.size() + k, false);
            }
            for (auto o : out) printf("%d ", o);
            puts("");
        }
    } else {
        int pp = atoi(a[4]), tg = atoi(a[5]), reps = atoi(a[6]);
        vector<llama_token> t(512); for (auto &z : t) z = rand() % nv;
        for (int test = 0; test < 2; test++) {
            int n = test ? tg : pp; double s = 0, best = 0; if (!n) continue;
            for (int r = 0; r <= reps; r++) {
                clear(); double b = now();
                if (!test) run(t.data(), n, 0, false); else for (int i = 0; i < n; i++) run(&t[i], 1, i, false);
                double sp = n / (now() - b); if (r) { s += sp; best = max(best, sp); }
            }
            printf("%s%d %.2f t/s (best %.2f)\n", test ? "tg" : "pp", n, s / reps, best);
        }
    }
}
