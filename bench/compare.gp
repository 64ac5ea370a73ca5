# gnuplot -c compare.gp TABLE PICTURE: share of the multiply-add peak over the length, for both masks and widths.
set terminal svg size 960,640 background rgb "white" font "sans-serif,13" rounded
set output ARG2
set datafile separator "\t"
set datafile missing NaN  # rows of other panels do not break the lines
set multiplot layout 2,2 title "Share of the core's multiply-add peak in useful FLOP (one thread, float)" font ",15"
set logscale x 2
set xrange [100:20000]
set yrange [0:100]
set xtics (128, 512, "1k" 1024, "4k" 4096, "16k" 16384)
set ytics 0,20,100
set grid ytics lc rgb "#dddddd"
set border 3
set tics nomirror
set ylabel "% of peak"
set xlabel "tokens n"
set key bottom right samplen 2
lengths(n) = n == 128 || n == 512 || n == 1024 || n == 4096 || n == 16384
do for [m in "full causal"] {
  do for [width in "64 128"] {
    set title sprintf("%s, d = %s", m, width)
    plot ARG1 using 3:(strcol(1) eq m && $2 == width + 0 && $4 == 1 && $5 == 0 && lengths($3) ? $10 : NaN) with linespoints pt 7 ps 0.7 lw 2 lc rgb "#888888" title "standard", \
         "" using 3:(strcol(1) eq m && $2 == width + 0 && $4 == 1 && $5 == 0 && lengths($3) ? $9 : NaN) with linespoints pt 7 ps 0.7 lw 2 lc rgb "#c0392b" title "differential", \
         "" using 3:(strcol(1) eq m && $2 == width + 0 && $4 == 1 && $5 == 0 && lengths($3) ? $11 : NaN) with linespoints pt 7 ps 0.7 lw 2 lc rgb "#2e86c1" title "differential, unfused Eigen"
  }
}
unset multiplot
