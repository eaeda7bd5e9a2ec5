const uint i = thread_position_in_grid.x;
float sum = 0;
for (int split = 0; split < SPLITS; split++) {
  sum += partial[ulong(split) * SIZE + i];
}
out[i] = T(sum);
